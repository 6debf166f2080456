"""What goes in and comes out: files of texts, corpora, tasks, files of results.

Each room is for one of these, and imports between rooms point down only; names on one level do not
import each other (tests/data/test_rooms.py):

`corpus | tasks > records > packed | sources > tables | output | order > splitmix`

`order` is one file and no room: both loaders, of packed rows and of tasks, go by it. `splitmix` is
where order and masks come from.
"""
