"""Offers of the price book, cheapest first."""
