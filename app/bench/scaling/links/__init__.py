"""Two nodes on one machine: network namespaces, and a link between them with a rate and a delay."""
