"""How long a round takes on a GPU, by arithmetic over config.json and data sheets."""
