"""Work that must be killable: `pool` asks, `loop` answers in the child, and each `*_child` module is what one kind of
child does.

Importing this imports nothing else of the project, so that a child starts fast.
"""
