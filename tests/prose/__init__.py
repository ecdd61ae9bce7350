"""The linter of the pages: proselint's checks, and those of this project's words and sentences.

`make lint` runs `python -m tests.prose`, which looks at all pages but the generated ones. A page
writes a word that is code as code, and then no rule looks at the word.
"""
