"""A page in the browser that shows a run, or several islands, and steers them."""
