"""What ops, links and devices cost and can do: measured here, or by their makers' word."""
