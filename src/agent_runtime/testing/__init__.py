"""For tests of yours and of ours."""
