"""Which rows trained when: a log of what does not follow from the seed, and answers from both."""
