"""All systems at once beside the best that other systems can be told to do."""
