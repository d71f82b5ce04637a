"""The search for a plan: cuts, map, order and recomputation together, by the simulated step."""
