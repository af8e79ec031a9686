"""Hold what the commands share, and the command `iha` itself.

`cli`, `api` and `cost` call the rooms above this one. Everything else here is below them and calls none.
"""
