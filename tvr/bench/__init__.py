"""Benchmarks of ops and models, side by side: `tvr bench`. docs/benchmarks.md has the protocol."""
