"""The processes of a run and the links between them."""
