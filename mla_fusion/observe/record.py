"""What the report says of each prologue: what became of it, why that is exact, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch.fx import Node

from mla_fusion.config import Config
from mla_fusion.emit.targets import target_of
from mla_fusion.fx import module_path
from mla_fusion.fx.kinds import is_mutating, word
from mla_fusion.fx.sizes import has_symbols
from mla_fusion.fx.view import View
from mla_fusion.fx.walk import upward, views_and_writes
from mla_fusion.machine import is_for_ge
from mla_fusion.match.finder import Finder, Found
from mla_fusion.match.indexer import beside
from mla_fusion.match.near_miss import NearMiss
from mla_fusion.observe import draw, proof
from mla_fusion.observe.gain import seconds_saved
from mla_fusion.observe.leftovers import leftovers, replaced
from mla_fusion.plan.plan import InPlace, Plan, PrologPlan, Staged, Structure
from mla_fusion.report.picture import Picture
from mla_fusion.report.rejection import Refuse, Rejection
from mla_fusion.report.report import Figure, Fusion, Report, Shown
from mla_fusion.report.staging import REMEDIES, StagedBy
from mla_fusion.report.text_tables import size


class Record:
    """Of one graph. Layers of one structure share a picture and a proof."""

    def __init__(self, view: View, finder: Finder, config: Config, report: Report) -> None:
        self._view, self._finder, self._config, self._report = view, finder, config, report
        self._pictures: dict[object, int | None] = {}
        self._named = module_path.Labels(view.gm.graph)

    def fused(
        self,
        plan: Plan,
        structure: Structure,
        proved: Shown,
        verified: str,
        figures: tuple[Figure, ...],
        compared: str,
        above: Refuse | None = None,
    ) -> None:
        """``above``: why a target above it did not take the prologue; the rest: what the proof and
        verification found.
        """
        target = target_of(plan)
        given = target.attributes(plan)
        leaves = leftovers(self._view, plan)
        saved = seconds_saved(plan, leaves, self._config.machine)
        self._report.fused.append(
            Fusion(
                layer=self._layer(plan.candidate.nodes),
                nodes=tuple(node.name for node in plan.candidate.nodes),
                dims=plan.dims,
                cache_mode=given.get("cache_mode", ""),
                placement=self._placement(plan),
                staged_by=self._staged_by(plan),
                leaves=leaves,
                operators_before=replaced(plan, structure),
                operators_after=1 + sum(item.launches for item in leaves),
                saves="" if saved is None else f"up to {max(saved, 0) * 1e6:.0f} us less a call",
                warnings=tuple(map(self._named, (*plan.warnings, *_copied_by_ge(plan)))),
                rope=_rotation(plan),
                attributes=given,
                replaced={item.node.name: item.output for item in plan.replacements},
                assumptions=tuple(map(self._named, plan.assumptions)),
                verified=self._named(verified),
                figures=figures,
                compared=compared,
                source=module_path.source(plan.candidate.down.node),
                picture=self._picture(structure, partial(draw.fused, self._finder, plan)),
                proof=(
                    *self._proof(plan, structure),
                    proved.text,
                    compared or verified,
                ),
                certificate=self._certificate(proved),
                target=plan.target,
                operator=target.called,
                instead_of=self._named(above.text) if above is not None else "",
                beside=self._beside(plan),
            )
        )

    def check_gain(self, plan: Plan) -> None:
        """Raise ``Refuse`` for a staged plan that saves no time."""
        caches = plan.caches
        if not isinstance(caches, Staged) or self._config.staging == "always":
            return
        saved = seconds_saved(plan, leftovers(self._view, plan), self._config.machine)
        if saved is not None and saved <= 0:
            why = ", ".join(f"[{one.code}] {one.message}" for one in caches.obstacles)
            detail = f"a call takes {-saved * 1e6:.0f} us more; not in place: {why}"
            raise Refuse("staging.gains_nothing", detail, plan.candidate.nodes[-2:])

    def _placement(self, plan: Plan) -> str:
        if isinstance(plan.caches, Staged):
            return f"staged: {self._named(plan.caches.reason)}"
        if not plan.caches.of_key:
            given = ", ".join(dict.fromkeys(item.output for item in plan.replacements))
            return f"{given} alone: the caches are left to the model"
        new = [
            cache.name
            for name, cache, _ in plan.caches.held
            if not _written_back(plan, name, cache)
        ]
        if not new:
            return "in place"
        whole = self._named(", ".join(new))
        return (
            "written by the kernel into new caches, as the model returns them: the whole of "
            f"{whole} is copied"
        )

    def rejected(self, item: Found, reason: Refuse, below: Iterable[Refuse] = ()) -> None:
        """``below``: why the targets that were tried after the first did not take it either."""
        is_missing = reason.code in draw.ABSENT  # then other steps are named as landmarks
        named = () if is_missing and reason.nodes else self._named.nodes(reason.detail)
        nodes = reason.nodes or named or item.nodes
        red = [node for node in nodes if node in named] or (() if is_missing else nodes)
        if self._config.skips(reason.code):
            reason = Refuse("skip", f"{reason.code} is in Config.skip; {reason.detail}", nodes)
        source = next(filter(None, map(module_path.source, (*red, *nodes, *item.nodes))), "")
        alike = (
            reason.code,
            source,
            *(str(node.target) for node in (*item.nodes, *nodes) if node.op == "call_function"),
        )
        self._report.rejected.append(
            Rejection(
                code=reason.code,
                message=replace(reason, detail=self._named(reason.detail)).message,
                nodes=tuple(node.name for node in nodes),
                layer=self._layer(item.nodes),
                source=source,
                picture=self._picture(
                    alike, partial(draw.rejected, self._finder, item, reason.code, nodes, red)
                ),
                score=item.score if isinstance(item, NearMiss) else 1.0,
                below=tuple(self._named(why.text) for why in below),
            )
        )

    def _staged_by(self, plan: Plan) -> tuple[StagedBy, ...]:
        if not isinstance(plan.caches, Staged):
            return ()
        found = (
            StagedBy(one.code, self._named(one.message), one.remedy or REMEDIES[one.code])
            for one in plan.caches.obstacles
        )
        return tuple(dict.fromkeys(found))

    def _beside(self, plan: Plan) -> str:
        """What reads c_q, where it is one that is known."""
        if not isinstance(plan, PrologPlan) or not plan.query_norm:
            return ""
        return str(beside(self._finder, plan.candidate) or "")

    def _layer(self, nodes: Sequence[Node]) -> str:
        """The module path; of a whole model its class."""
        return module_path.layer(nodes) or self._named.whole

    def _proof(self, plan: Plan, structure: Structure) -> tuple[str, ...]:
        """Equal for layers of equal structure, but for what each says of its slots."""
        structure.lines = structure.lines or tuple(map(self._named, proof.lines(self._view, plan)))
        return (*structure.lines, self._named(proof.slots(plan)))

    def _certificate(self, shown: Shown) -> int | None:
        """Its place in ``Report.certificates``."""
        if shown.certificate is None:
            return None
        known = self._report.certificates
        for place, one in enumerate(known):
            if one is shown.certificate:
                return place
        known.append(shown.certificate)
        return len(known) - 1

    def _picture(self, key: object, draw_it: Callable[[], Picture | None]) -> int | None:
        """The place in ``Report.pictures`` of the one that stands for ``key``; drawn when first
        asked for.
        """
        if key not in self._pictures:
            drawn, pictures = draw_it(), self._report.pictures
            self._pictures[key] = None if drawn is None else len(pictures)
            pictures += [drawn] if drawn is not None else []
        return self._pictures[key]


def _rotation(plan: Plan) -> str:
    """The order of elements before and behind the rotation, and in what the kernel gives out."""
    rope = plan.candidate.rotation
    if not rope.rotates:
        return "none: cos is 1, sin is 0"
    stored = ", stored as halves" if plan.warnings else ""
    return f"{rope.input_layout} in, {rope.layout} out{stored}"


def _copied_by_ge(plan: Plan) -> Iterator[str]:
    """Caches that torchair copies, since GE takes contiguous inputs alone: a line for each."""
    for _, cache, _ in plan.caches.held if is_for_ge() else ():
        value = cache.meta["val"]
        if not value.is_contiguous():
            moved = "" if has_symbols(value.shape) else f" ({size(2 * value.nbytes)} a step)"
            yield (
                f"{cache.name} has strides {list(value.stride())}, and GE takes contiguous inputs "
                f"alone: torchair copies the whole of it in and back at every step{moved}. Give "
                "each layer contiguous caches, or compile with npugraph_ex"
            )


def _written_back(plan: Plan, name: str, cache: Node) -> bool:
    """Does the model write this input, rather than make a new cache of it?"""
    assert isinstance(plan.caches, InPlace)
    results = [item.node for item in plan.replacements if item.output == name]
    if plan.caches.copies or not results:
        return True
    if any(word(user) == "copy_" and user.args[0] is cache for user in cache.users):
        return True
    return any(is_mutating(step) for node in results for step in upward(node, views_and_writes))
