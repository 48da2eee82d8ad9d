"""`python -m tvr` is `tvr`."""

from __future__ import annotations

from tvr.cli import main

if __name__ == "__main__":
    main()
