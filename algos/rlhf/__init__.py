"""Language models that learn from demonstrations, preferences and rewards."""
