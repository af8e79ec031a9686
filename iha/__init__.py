"""Hold what the commands share, and the command `iha` itself.

`cli`, `api` and `cost` call `conversion_scripts`. Everything else here is below the other folders and calls none.
"""
