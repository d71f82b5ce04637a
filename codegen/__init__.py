"""Writes the package: decisions in Python, layout in templates."""
