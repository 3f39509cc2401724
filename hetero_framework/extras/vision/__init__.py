"""Pictures in the data: models of language and vision train on texts with pictures."""
