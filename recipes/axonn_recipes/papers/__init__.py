"""Every numbered table and figure of the five papers: what was published, what comes out here, and whether they agree."""
