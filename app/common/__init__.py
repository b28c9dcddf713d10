"""Code that every other package uses: errors, files, formats, facts about the machine."""
