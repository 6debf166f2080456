"""Modules that scripts import beside poptorch, as far as they need no IPU; see `names.COMPANIONS`.

Each stands in for a package that is not installed; one that is installed is used itself.
"""
