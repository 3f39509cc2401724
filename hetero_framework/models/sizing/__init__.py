"""How much memory and work the parts of a model take, without loading it."""
