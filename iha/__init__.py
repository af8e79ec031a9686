"""Hold the commands and what they share.

`conversion`, `hub` and `serving` hold convert, verify, push, pull and serve, `cli` runs them as the command `iha`, and
`api` gives them to Python.
"""
