"""A pipeline over processes: each rank runs its device's row, and replicas share out the batch."""
