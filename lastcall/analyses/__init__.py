"""Questions that need both routing and stats: stronger learners, conditional independence, power."""
