"""How a trainer reaches an engine."""
