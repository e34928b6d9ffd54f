"""The servers' protocols behind one interface: a row asks, whoever answers."""
