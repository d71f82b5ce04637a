"""What is known of the ops of a captured graph: where from, under which modes, of which sizes."""
