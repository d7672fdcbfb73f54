"""Shop in a simulated web shop: find, configure and buy the product an instruction asks for; the score is the original WebShop's."""
