"""Small models and real engines, for the demo, the benchmarks and tests."""
