"""Executes a package: one process, a lane per device."""
