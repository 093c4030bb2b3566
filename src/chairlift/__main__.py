"""``python -m chairlift`` is the command ``chairlift``."""

from chairlift.api.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
