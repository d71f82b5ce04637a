"""The original model's weights in the stages, and from and to files, under its own names."""
