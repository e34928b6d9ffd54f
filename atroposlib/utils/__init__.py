"""Helpers that environments import one by one; none needs torch."""
