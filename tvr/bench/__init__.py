"""Benchmarks of ops, side by side: `tvr bench`. docs/benchmarks.md has the protocol."""
