"""Benchmarks: what they measure, and the tables of docs/performance.md that they write."""
