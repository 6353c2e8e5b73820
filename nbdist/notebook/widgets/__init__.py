"""Widgets, each a .py for the kernel and a .js and .css for the page (client, browser)."""
