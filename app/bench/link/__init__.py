"""Two nodes on this machine, and a link of a given rate and delay between them: for the laboratories."""
