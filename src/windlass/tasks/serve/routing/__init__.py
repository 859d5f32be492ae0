"""All routes in one table, and the OpenAPI document that is made of it."""
