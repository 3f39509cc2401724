"""Tables as data: comma- and tab-separated text, Arrow and Feather."""
