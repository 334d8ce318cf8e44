"""From received bytes to a model that generates with them."""
