"""Models that are made for more than text: the text part trains, the other parts stay."""
