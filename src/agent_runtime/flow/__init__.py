"""A graph of nodes whose every superstep ends in a sealed checkpoint and whose every call replays."""
