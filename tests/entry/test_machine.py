"""Chips and CANN releases by the names they go by, and which are taken where none is named."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

import mla_fusion as mf
from mla_fusion import machine
from mla_fusion.machine import release_named, soc_named

NAMES = {
    "A2": ("A2", "910B", "910b", "Ascend910B2", "ascend_910b", "Atlas A2"),
    "A3": ("A3", "910C", "Ascend910_93", "Ascend910_9392", "910_93"),
    "A5": ("A5", "950PR", "Ascend950", "Ascend910_9589", "ascend950dt"),
}
RELEASES = {"8.2.RC1": "8.2", "8.3": "8.3", "8.4.0": "8.3", "9.1.0": "9.1", "latest": "latest"}


@pytest.mark.parametrize(
    ("soc", "name"), [(soc, name) for soc, names in NAMES.items() for name in names]
)
def test_a_chip_by_its_names(soc: str, name: str) -> None:
    assert soc_named(name) == mf.Config(soc=name).soc == soc


@pytest.mark.parametrize("version", RELEASES)
def test_the_release_of_a_cann_version(version: str) -> None:
    assert release_named(version) == mf.Config(cann=version).cann == RELEASES[version]
    assert release_named("10.0", found=True) == "latest"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("soc", "Ascend310P3"),
        ("soc", "H100"),
        ("soc", "910"),
        ("soc", "910A"),
        ("soc", ""),
        ("soc", None),
    ]
    + [("cann", value) for value in ("99.2", "8.1.RC1", "7.0", "unknown", "8", "8.30x", None)],
)
def test_what_the_tables_do_not_know_is_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"Config.{field}: "):
        mf.Config(**{field: value})


def test_without_an_npu_a3_and_the_newest_are_taken_and_said_so() -> None:
    assert str(mf.Config().machine) == "A3, CANN latest (assumed, no NPU here)"
    assert str(mf.Config(soc="910B", cann="8.5.0").machine) == "A2, CANN 8.5"
    assert mf.Config(soc="A2").machine.cann == "latest"


@pytest.mark.parametrize(
    ("name", "cann", "said"),
    [
        ("Ascend910B2", "8.3.RC1", "A2, CANN 8.3 (Ascend910B2)"),
        ("Ascend910_9392", "9.1.0", "A3, CANN 9.1 (Ascend910_9392)"),
        (
            "Ascend310P3",
            "9.1.0",
            "A3, CANN 9.1 (Ascend310P3; assumed, since 'Ascend310P3' is no chip",
        ),
        ("Ascend950PR", "10.0", "A5, CANN latest (Ascend950PR)"),
        ("Ascend950PR", "7.0", "A5, CANN latest (Ascend950PR; assumed, since CANN 7.0 is older"),
    ],
)
def test_on_an_npu_they_are_asked_of_it(
    name: str, cann: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No NPU stands behind this: what torch_npu answers is stood in for."""
    monkeypatch.setattr(machine, "cann_version", lambda: cann)
    torch_npu = ModuleType("torch_npu")
    torch_npu.npu = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    assert str(mf.Config().machine).startswith(said)


def test_a_configuration_that_is_none_is_refused_at_once() -> None:
    for call in (mf.backend, mf.torchair_pass, lambda config: mf.lower(print, config=config)):
        with pytest.raises(
            TypeError,
            match=r"config must be a mla_fusion\.Config, such as .*, "
            r"got 'all'",
        ):
            call("all")
