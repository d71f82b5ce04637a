"""Lower bounds: the time under which no plan of a chain can get, whatever its cuts and order."""
