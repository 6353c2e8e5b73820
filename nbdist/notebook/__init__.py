"""IPython magics, cell output and widgets: what a notebook sees of a world (client, browser)."""
