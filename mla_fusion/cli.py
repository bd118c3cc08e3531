"""``python -m mla_fusion.cli COMMAND``: the ``mla-fusion`` command, without its script."""

from mla_fusion.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
