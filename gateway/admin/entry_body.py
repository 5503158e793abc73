"""What is put to `/admin/tenants/NAME` and `/admin/routes/NAME`: a table of the file, whose name may be left
to the URL."""

from __future__ import annotations

from pydantic import create_model

from shared.config import RouteConfig, TenantConfig
from shared.section import Name

TenantBody = create_model("TenantBody", __base__=TenantConfig, name=(Name | None, None))
RouteBody = create_model("RouteBody", __base__=RouteConfig, name=(Name | None, None))
