"""Environment servers, one per file; each runs alone. A wheel installs this package as `atropos_environments`."""
