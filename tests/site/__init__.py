"""The site: all pages where they stand, by reader and task. `make site` builds it in `build/site`.

`navigation.py` says which page is where, `conf.py` is Sphinx's configuration, `pictures` are the
scripts that make the pictures of the pages.
"""
