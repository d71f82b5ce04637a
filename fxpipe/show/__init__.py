"""What a user sees of a package, a plan, a step: tables, drawings, a page, the progress of work."""
