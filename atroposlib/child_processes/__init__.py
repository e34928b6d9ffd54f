"""Work that must be killable: `pool` sends requests, `loop` answers them in the child, and each `*_child` module
implements one kind of child.

Importing this imports nothing else of the project, so that a child starts fast.
"""
