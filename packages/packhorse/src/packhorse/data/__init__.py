"""Data that goes in and comes out: tables of texts, corpora, task files, files of results.

Each package or module is for one kind of data. Imports between them point down only, and names on
one level do not import each other (tests/data/test_rooms.py):

`corpus | tasks > records > packed | sources > tables | output | order`

`order` is what both loaders share, that of packed rows and that of tasks: which rows come when, and
on which rank.
"""
